"""The jobs of the command line: fit, check, evaluate, predict, export."""
