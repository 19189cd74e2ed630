"""The sans-IO core: no await, no clock, no logging, no client library. Testable by replaying a list."""
