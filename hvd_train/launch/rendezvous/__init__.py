"""Rendezvous for ranks whose launcher does not connect them, without ssh, MPI or PMIx."""
