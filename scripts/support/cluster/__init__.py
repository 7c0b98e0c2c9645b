"""Several servers behind a proxy that keep their sequences in one store: what scripts/cluster runs."""
