"""The built-in transports, by the suite that third parties use."""

# ruff: noqa: RUF012 - what a subject is like is said in one line each

from redis import Redis

from tllm_core.conformance import TransportConformance, nats_server, valkey_server
from tllm_core.contracts.interfaces import Capability


class TestInproc(TransportConformance):
    transport = "inproc"
    narrow = {"queue_frames": 16}


class TestZmqIpc(TransportConformance):
    transport = "zmq"
    narrow = {"high_water_frames": 16}
    lacks = Capability.CROSS_HOST | Capability.RECONNECTS  # a socket of this host, which nothing can cut

    def settings(self, address):
        return {"directory": self.directory}


class TestZmqTcp(TransportConformance):
    transport = "zmq"
    narrow = {"high_water_frames": 16}

    def settings(self, address):
        return {"protocol": "tcp", "directory": self.directory}


class TestNats(TransportConformance):
    transport = "nats"
    broker = nats_server()
    narrow = {"receive_queue_bytes": 1 << 20}

    def settings(self, address):
        return {"url": f"nats://{address}"}

    def leftovers(self):
        return [connection["name"] for connection in self.broker.monitor("connz")["connections"]]


class TestRedis(TransportConformance):
    transport = "redis"
    broker = valkey_server()
    narrow = {"queue_frames": 16}

    def settings(self, address):
        return {"url": f"redis://{address}"}

    def leftovers(self):
        with Redis(port=self.broker.port) as client:
            return [key.decode() for key in client.keys("*")]
