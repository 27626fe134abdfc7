"""DiLoCo: jobs that train by themselves and now and then average what they have changed, over slow links."""
