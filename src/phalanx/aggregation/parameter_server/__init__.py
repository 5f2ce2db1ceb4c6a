"""The parameter server as a service: servers apply gradients, workers push and pull.

modes     when a step may begin, and what is applied together: rows of a table
shards    which server has which parameters, and where they lie in a message
words     what is said besides tensors
clocks    who has joined, and how far each is
desk      the protocol: what came goes in, what is to be done comes out; it does no I/O
holding   the parameters of one server, and their optimizer
line      one worker's messages, on the server's side
server    the loop: wait for any message, ask the desk, do what it says
client    the worker's side
"""

from phalanx.aggregation.parameter_server.client import ParameterClient
from phalanx.aggregation.parameter_server.server import serve
from phalanx.aggregation.parameter_server.state import ServerMode, ServiceRecord

__all__ = ["ParameterClient", "ServerMode", "ServiceRecord", "serve"]
