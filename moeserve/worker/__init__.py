"""One per rank: input batch, model runner, sampler, and the channel from the replica's leader."""
