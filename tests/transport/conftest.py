import pytest

from libra.transport import Server

SECRET = "known to the processes of one run"


def echo(channel, client):
    """Send every frame back; {"quit": ...} ends the connection, {"raise": ...} fails."""
    while (frame := channel.recv_frame()) is not None:
        if "quit" in frame:
            return
        if "raise" in frame:
            raise KeyError(frame["raise"])
        channel.send_frame(**frame)


@pytest.fixture
def serve():
    started = []

    def start(handle=echo, *, purpose="test"):
        started.append(Server(handle, secret=SECRET, purpose=purpose, host="127.0.0.1"))
        return started[-1]

    yield start
    for server in started:
        server.close()
