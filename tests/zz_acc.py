import torch, torch.distributed as dist, traceback, os
from tests.support import llama
from tests.support.pool import run
def f(kind):
    out=[]
    try:
        os.environ.setdefault("MASTER_ADDR","127.0.0.1"); os.environ.setdefault("MASTER_PORT","29544")
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin as P
        kw={}
        if kind=="fsdp2": kw["fsdp_plugin"]=P(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], cpu_offload=False)
        if kind=="fsdp1": kw["fsdp_plugin"]=P(fsdp_version=1, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], use_orig_params=True, sync_module_states=False)
        a = Accelerator(cpu=True, gradient_accumulation_steps=2, **kw)
        out.append((str(a.distributed_type), str(a.device), a.num_processes))
        m = llama.single()
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        m, opt = a.prepare(m, opt)
        out.append((type(m).__mro__[:3], m.__dict__.get("forward"), hasattr(m,"_original_forward")))
        t,l = llama.batch(dist.get_rank())
        with a.accumulate(m):
            loss = llama.loss_of(m(t), l); a.backward(loss)
        out.append(float(loss))
        out.append([(n, tuple(p.shape), type(p.data).__name__, None if p.grad is None else 1) for n,p in m.named_parameters()][:3])
    except BaseException: out.append(traceback.format_exc()[-1800:])
    return out
if __name__=="__main__":
    for k in ("ddp","fsdp1","fsdp2"):
        print(k)
        try:
            for x in run(2,f,k)[0]: print("   ",x)
        except BaseException as e: print(str(e)[-1500:])
