"""Communication between ranks: topology, collectives, algorithms, transports."""
