"""What weight_speed.py adds to vLLM's worker; apart from it, because vLLM must be imported after megatron-core on the CPU."""
from checks import sync_speed
from common.receive_weights import WeightReceiver


class Worker(WeightReceiver):
    peak = sync_speed.Worker.peak
