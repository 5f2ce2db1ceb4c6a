"""Transports: how bytes move between ranks, in one process, over TCP, in shared memory."""
