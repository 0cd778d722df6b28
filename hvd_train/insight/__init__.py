"""What measured times say: laws, factors and predictions. No framework, no files of its own."""
