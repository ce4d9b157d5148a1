"""The operators' web page: its source files, put together by `narwhal_trio.edge.dashboard`."""
