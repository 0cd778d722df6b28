"""One process as a rank."""
