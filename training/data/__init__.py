"""Text to tokens, and tokens to samples: the stage `prepare` writes the store that every trainer reads."""
