"""What runs on the host, without arrays: the scheduler, its pages, requests and the choice of K."""
