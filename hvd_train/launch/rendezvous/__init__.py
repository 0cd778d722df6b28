"""The rendezvous of ranks that no launcher brings together: without ssh, without MPI, without PMIx."""
