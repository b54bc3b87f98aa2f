"""Frames over Redis Streams (Redis 6.2 or later, Valkey): one stream per direction and frontend, nothing that has to be kept."""

from tllm_core.transports.redis.settings import RedisSettings
from tllm_core.transports.redis.transport import RedisTransport

__all__ = ["RedisSettings", "RedisTransport"]
