"""Runs a schedule on this process: channels, stages, gradients, random streams, one engine."""
