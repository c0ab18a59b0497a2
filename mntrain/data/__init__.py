"""Which samples are whose, and the loaders that bring them."""
