"""The command line program `phalanx`."""
