"""Faults that trainers really have, planted into a worker: ``python -m tests.verify.faults.NAME ARGUMENTS``.

Each shows with more than one rank alone.
"""
