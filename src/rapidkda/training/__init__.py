"""Training of the small model that ships with the package, and the synthetic tasks that it is trained and judged on."""
