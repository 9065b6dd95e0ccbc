"""Processes and the machines they run on."""
