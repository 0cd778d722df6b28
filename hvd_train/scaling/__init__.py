"""Scaling studies: train on 1, 2, 4, ... ranks, and say what each number of ranks costs and brings."""
