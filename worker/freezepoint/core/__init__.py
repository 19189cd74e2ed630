"""The sans-IO core: no await, no clock, no log, no client library."""
