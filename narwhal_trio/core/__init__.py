"""The trio mechanisms under the router: lifetimes, FIFO admission, supervision."""
