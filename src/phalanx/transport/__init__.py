"""Transports: moving bytes between ranks, in one process, over TCP, in shared memory."""
