"""Mixture of experts: router, dispatch, experts and combine as four parts, with the shared experts beside them."""
