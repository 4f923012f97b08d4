"""Routers: what picks the experts of a layer, one file each."""
