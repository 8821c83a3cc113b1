"""A fleet of GPUs that serves robots, on virtual time, decided by the scheduler that the server runs."""
