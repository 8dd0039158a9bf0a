"""Advantages (numpy), ratios and losses (torch), the table of losses, and batches made of finished groups."""
