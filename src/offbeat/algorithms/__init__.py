"""Advantages (numpy), ratios and losses (torch), and the presets that combine them."""
