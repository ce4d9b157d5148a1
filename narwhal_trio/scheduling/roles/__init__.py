"""The role controller's policy: when which engine changes between prefill and decode. Pure; `controller` puts it together."""
