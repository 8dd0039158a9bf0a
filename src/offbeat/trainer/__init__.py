"""One rank's training: forward, backward, optimizer step."""
