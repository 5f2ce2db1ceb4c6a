"""The parameter server as a service: servers apply gradients, workers push and pull.

wire      messages: their kinds and headers, which server has which parameters
state     the protocol of a server, without I/O: messages go in, actions come out
server    the loop: wait for any message, pass it to the state, do the resulting actions
client    the worker's side
"""

from phalanx.aggregation.parameter_server.client import ParameterClient
from phalanx.aggregation.parameter_server.state import ServerMode, ServiceRecord

__all__ = ["ParameterClient", "ServerMode", "ServiceRecord"]
