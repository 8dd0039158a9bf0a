"""The Tinker-compatible service: many tenants fine-tune and sample on one base model over HTTP."""
