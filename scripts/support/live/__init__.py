"""The page that draws sound and the probability of speech while they come, and its server."""
