"""Serve a model: continuous batching, an exact prefix cache, an HTTP endpoint in OpenAI's form (`subquad[serve]`)."""
