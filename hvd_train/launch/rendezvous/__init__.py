"""How ranks that no launcher brings together find one another: without ssh, without MPI, without PMIx."""
