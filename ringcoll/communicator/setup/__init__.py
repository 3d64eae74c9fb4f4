"""Making communicators: ranks found and placed, their machine and its tables agreed by all."""
