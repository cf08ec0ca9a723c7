import os,sys,time
os.environ.pop("TRITON_INTERPRET",None)
import triton
from triton.backends.compiler import GPUTarget
from flashbench.kernels import _compile
from flashbench.problem import Problem
class D(_compile._NoDevice):
    def get_current_device(self): return 942
triton.runtime.driver.set_active(D(GPUTarget("hip","gfx942",64)))
p=Problem(batch=1,num_heads=2,num_kv_heads=2,seqlen_q=512,seqlen_k=512,head_dim=64,head_dim_v=64,dtype="bf16",causal=True)
for k in ("fwd","delta","dq","dkdv"):
    t=time.time()
    try:
        c=_compile.launch(_compile.Task(k,p,(8,0),65536)).compile()
        print(k,time.time()-t,list(c.asm),c.metadata.shared)
        a=c.asm["amdgcn"]; print([l for l in a.splitlines() if "spill" in l or "scratch" in l.lower()][:6])
    except Exception as e:
        print(k,type(e),str(e)[:500])
