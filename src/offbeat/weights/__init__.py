"""Publishing of immutable weight versions to engines, with proof."""
