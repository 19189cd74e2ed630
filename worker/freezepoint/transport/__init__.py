"""The transports: one set of ports, two adapters (``kafka://`` and ``sqlite:///``)."""
