"""The command line: `phalanx`."""
