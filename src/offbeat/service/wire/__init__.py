"""Bytes of the protocol to the service's own terms, and outcomes back to bytes. Used by `app`; the core never imports it."""
