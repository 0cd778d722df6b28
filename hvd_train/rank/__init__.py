"""Run a process as a rank."""
