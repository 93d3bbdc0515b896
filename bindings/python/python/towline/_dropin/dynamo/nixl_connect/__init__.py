"""Stands for Dynamo's module of this name while this directory is first on the path."""

import sys

import towline.nixl_connect

# The module itself, so that patches of its names are seen by both names.
sys.modules[__name__] = towline.nixl_connect
