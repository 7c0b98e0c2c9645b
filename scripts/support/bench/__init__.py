"""The benchmark: what a step costs in process, and what clients get over the network."""
