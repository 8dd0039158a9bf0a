"""Credit for rewards, batches made of finished groups, and the table of losses; in numpy, without torch."""
