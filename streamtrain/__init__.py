"""Real-time learning for recommenders, ads and search."""
