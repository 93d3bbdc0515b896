"""Stands for Dynamo's module of this name, and offers memory to peers that run the original."""

import sys

import towline.nixl_connect
from towline.nixl_connect._connector import offer_by_default

offer_by_default("nixl")
# The module itself, so that patches of its names are seen by both names.
sys.modules[__name__] = towline.nixl_connect
