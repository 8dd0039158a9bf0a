"""Translates between the bytes of the protocol and the service's own terms. Used by `app`; the core never imports it."""
