"""What one rank does: forward, backward, optimizer step."""
