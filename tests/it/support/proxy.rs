//! A network between a client and its server that fails when told to.
//!
//! One thread moves all bytes and carries out every order between two of its steps: what a control
//! forbids has ended when the control returns. It knows no protocol.
//!
//! It ends connections; it cannot lose packets. The kernel acknowledges whatever is sent to a frozen
//! network, so of the client's own limits only those on an *answer* are met, and neither keepalives
//! nor `tcp_user_timeout`.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_linger;

use super::url::Url;

/// How much is taken in for one direction of one connection before its sender has to wait.
const ROOM: usize = 1 << 20;
const CONNECT: Duration = Duration::from_secs(5);
const GONE: &str = "the proxy's thread is alive";

/// A way to one server. Everything ends, with RST, when it is dropped.
pub(crate) struct Proxy {
    addr: SocketAddr,
    orders: Sender<Order>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

type Order = Box<dyn FnOnce(&mut Network) + Send>;

impl Proxy {
    pub(crate) fn start(upstream: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let (orders, received) = mpsc::channel();
        let (waker, woken) = UnixStream::pair().expect("a pair of sockets");
        for nonblocking in [
            listener.set_nonblocking(true),
            woken.set_nonblocking(true),
            waker.set_nonblocking(true),
        ] {
            nonblocking.expect("a socket that does not block");
        }
        let network = Network {
            listener,
            upstream,
            links: Vec::new(),
            frozen: [false; 2],
            delay: [Duration::ZERO; 2],
            refusing: false,
            cutting: false,
            trap: None,
            total: 0,
        };
        let thread = thread::Builder::new()
            .name("test-proxy".to_owned())
            .spawn(move || network.run(&received, &woken))
            .expect("a thread");
        Proxy {
            addr,
            orders,
            waker,
            thread: Some(thread),
        }
    }

    /// To the server of a database URL.
    pub(crate) fn to(url: &str) -> Proxy {
        Proxy::start(Url::parse(url).addr())
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The same URL by way of this proxy.
    pub(crate) fn url(&self, url: &str) -> String {
        Url::parse(url).with_addr(self.addr)
    }

    /// Forwards nothing in either direction: no byte, no end, no reset. Connections stay open, and
    /// new ones are accepted, but none reaches the server.
    pub(crate) fn freeze(&self) {
        self.ask(|network| network.frozen = [true; 2]);
    }

    /// As [`Proxy::freeze`], for replies alone: the server goes on with what it is asked.
    pub(crate) fn freeze_replies(&self) {
        self.ask(|network| network.frozen[REPLIES] = true);
    }

    /// Ends either freeze; what was held back arrives.
    pub(crate) fn thaw(&self) {
        self.ask(|network| network.frozen = [false; 2]);
    }

    /// Resets every connection that there is, at both ends.
    pub(crate) fn drop_connections(&self) {
        self.ask(|network| {
            network.accept();
            network.links.drain(..).for_each(Link::reset);
        });
    }

    /// Resets every new connection.
    pub(crate) fn refuse(&self) {
        self.ask(|network| {
            network.accept(); // these came before
            network.refusing = true;
        });
    }

    /// Ends [`Proxy::refuse`].
    pub(crate) fn accept(&self) {
        self.ask(|network| {
            network.accept(); // these came before
            network.refusing = false;
        });
    }

    /// From now on no reply arrives: the server is asked and answers, and then the connection is
    /// reset. New connections too do not get past the first words of the server.
    pub(crate) fn cut_replies(&self) {
        self.ask(|network| network.cutting = true);
    }

    /// As [`Proxy::cut_replies`], for the next request of any connection only. One call of Diesel may
    /// be several requests (prepare and run, say): [`Proxy::cut_reply_to`] picks one.
    pub(crate) fn cut_next_reply(&self) {
        self.cut_reply_to("");
    }

    /// As [`Proxy::cut_replies`], only for the next request with these bytes in it. A value that is
    /// bound, such as the name of a lease, is in the request that runs a statement and not in the one
    /// that prepares it.
    pub(crate) fn cut_reply_to(&self, bytes: &str) {
        self.set_trap(bytes, Then::Cut);
    }

    /// As [`Proxy::freeze_replies`], but only once a request with these bytes in it has come.
    pub(crate) fn freeze_reply_to(&self, bytes: &str) {
        self.set_trap(bytes, Then::Freeze);
    }

    /// Whether a request that such an order waits for has not come yet, or not been answered.
    pub(crate) fn is_waiting(&self) -> bool {
        self.ask(|network| network.trap.is_some() || network.links.iter().any(|link| link.cutting))
    }

    /// Ends every kind of cut, and takes back an order for a request that has not come.
    pub(crate) fn stop_cutting(&self) {
        self.ask(|network| {
            network.cutting = false;
            network.trap = None;
            for link in &mut network.links {
                link.cutting = false;
            }
        });
    }

    /// From now on each request arrives that much later.
    pub(crate) fn delay_requests(&self, delay: Duration) {
        self.ask(move |network| network.delay[REQUESTS] = delay);
    }

    /// From now on each reply arrives that much later.
    pub(crate) fn delay_replies(&self, delay: Duration) {
        self.ask(move |network| network.delay[REPLIES] = delay);
    }

    /// How many connections a client has open now.
    pub(crate) fn connections(&self) -> usize {
        self.ask(|network| {
            network.accept();
            let open = |link: &&Link| !link.flows[REQUESTS].ended;
            network.links.iter().filter(open).count()
        })
    }

    /// How many connections were ever made, refused ones included.
    pub(crate) fn total(&self) -> usize {
        self.ask(|network| {
            network.accept();
            network.total
        })
    }

    fn set_trap(&self, bytes: &str, then: Then) {
        let bytes = bytes.as_bytes().to_vec();
        self.ask(|network| network.trap = Some(Trap { bytes, then }));
    }

    /// Lets the thread carry out an order, and waits for that.
    fn ask<T: Send + 'static>(&self, order: impl FnOnce(&mut Network) -> T + Send + 'static) -> T {
        let (reply, answer) = mpsc::sync_channel(1);
        let order = Box::new(move |network: &mut Network| {
            let _ = reply.send(order(network));
        });
        self.orders.send(order).expect(GONE);
        self.wake();
        answer.recv().expect(GONE)
    }

    fn wake(&self) {
        // full: it is being woken already
        let _ = (&self.waker).write(&[0]);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let (nobody, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.orders, nobody));
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const REQUESTS: usize = 0;
const REPLIES: usize = 1;

/// What the thread has.
struct Network {
    listener: TcpListener,
    upstream: SocketAddr,
    links: Vec<Link>,
    /// By direction, as the delays.
    frozen: [bool; 2],
    delay: [Duration; 2],
    refusing: bool,
    /// Every reply is to be cut.
    cutting: bool,
    trap: Option<Trap>,
    total: usize,
}

/// What happens at the next request with certain bytes in it.
struct Trap {
    bytes: Vec<u8>,
    then: Then,
}

enum Then {
    Cut,
    Freeze,
}

impl Trap {
    fn takes(&self, request: &[u8]) -> bool {
        let bytes = &self.bytes;
        bytes.is_empty() || request.windows(bytes.len()).any(|part| part == bytes)
    }
}

/// One client and its connection to the server.
struct Link {
    client: TcpStream,
    /// None until the network lets through to it.
    server: Option<TcpStream>,
    flows: [Flow; 2],
    /// The reply that comes now is to be cut.
    cutting: bool,
}

/// What is on its way in one direction.
#[derive(Default)]
struct Flow {
    queue: VecDeque<(Instant, Packet)>,
    /// Bytes in the queue.
    length: usize,
    /// Its source sends no more.
    ended: bool,
    /// Its destination was told so.
    closed: bool,
}

enum Packet {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// A connection was reset, and the reset has got through.
struct Reset;

impl Network {
    fn run(mut self, orders: &Receiver<Order>, woken: &UnixStream) {
        loop {
            let mut wakes = [0; 64];
            while matches!((&mut &*woken).read(&mut wakes), Ok(1..)) {}
            loop {
                match orders.try_recv() {
                    Ok(order) => order(&mut self),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        self.links.drain(..).for_each(Link::reset);
                        return;
                    }
                }
            }
            self.accept();
            let mut links = std::mem::take(&mut self.links);
            for mut link in links.drain(..) {
                match link.turn(&mut self) {
                    Ok(()) if link.flows.iter().all(|flow| flow.closed) => drop(link),
                    Ok(()) => self.links.push(link),
                    Err(Reset) => link.reset(),
                }
            }
            self.wait(woken);
        }
    }

    fn accept(&mut self) {
        loop {
            let client = match self.listener.accept() {
                Ok((client, _)) => client,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => panic!("accept: {error}"),
            };
            self.total += 1;
            let link = Link {
                client: prepare(client),
                server: None,
                flows: Default::default(),
                cutting: false,
            };
            if self.refusing {
                link.reset();
            } else {
                self.links.push(link);
            }
        }
    }

    /// Sleeps until something can be done.
    fn wait(&self, woken: &UnixStream) {
        let now = Instant::now();
        let mut until = None;
        let mut polled = vec![
            PollFd::new(woken, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        for link in &self.links {
            for (end, comes, goes) in [
                (Some(&link.client), REQUESTS, REPLIES),
                (link.server.as_ref(), REPLIES, REQUESTS),
            ] {
                let Some(end) = end else { continue };
                let mut events = PollFlags::empty();
                events.set(PollFlags::IN, link.flows[comes].has_room());
                match link.flows[goes].queue.front() {
                    Some((due, _)) if !self.frozen[goes] => {
                        events.set(PollFlags::OUT, *due <= now);
                        if *due > now {
                            until = Some(until.map_or(*due, |at: Instant| at.min(*due)));
                        }
                    }
                    _ => {}
                }
                if !events.is_empty() {
                    polled.push(PollFd::new(end, events));
                }
            }
        }
        let timeout = until.map(|at| {
            let rounded_up = at - now + Duration::from_millis(1);
            Timespec::try_from(rounded_up).expect("a short time")
        });
        // an error is an interruption
        let _ = poll(&mut polled, timeout.as_ref());
    }
}

impl Link {
    /// Takes in what has come, and forwards what may go.
    fn turn(&mut self, network: &mut Network) -> Result<(), Reset> {
        let now = Instant::now();
        while let Some(bytes) = self.receive(REQUESTS, now + network.delay[REQUESTS]) {
            if let Some(trap) = network.trap.take_if(|trap| trap.takes(&bytes)) {
                match trap.then {
                    Then::Cut => self.cutting = true,
                    Then::Freeze => network.frozen[REPLIES] = true,
                }
            }
            self.flows[REQUESTS].push(bytes, now + network.delay[REQUESTS]);
        }
        if self.server.is_none() && !network.frozen[REQUESTS] && !self.flows[REPLIES].ended {
            match TcpStream::connect_timeout(&network.upstream, CONNECT) {
                Ok(server) => self.server = Some(prepare(server)),
                Err(_) => self.flows[REPLIES].end(Packet::Reset, now),
            }
        }
        while let Some(bytes) = self.receive(REPLIES, now + network.delay[REPLIES]) {
            if self.cutting || network.cutting {
                return Err(Reset);
            }
            self.flows[REPLIES].push(bytes, now + network.delay[REPLIES]);
        }
        for direction in [REQUESTS, REPLIES] {
            if !network.frozen[direction] {
                self.forward(direction, now + network.delay[1 - direction])?;
            }
        }
        Ok(())
    }

    /// The next bytes from a source, if any. Its end is put into the flow, to arrive at `due`.
    fn receive(&mut self, direction: usize, due: Instant) -> Option<Vec<u8>> {
        let mut source = match direction {
            REQUESTS => &self.client,
            _ => self.server.as_ref()?,
        };
        let flow = &mut self.flows[direction];
        let mut buffer = vec![0; 16 << 10];
        while flow.has_room() {
            match source.read(&mut buffer) {
                Ok(0) => flow.end(Packet::End, due),
                Ok(length) => {
                    buffer.truncate(length);
                    return Some(buffer);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => flow.end(Packet::Reset, due),
            }
        }
        None
    }

    /// Hands to a destination what is due. If it has gone, the source hears of that at `back`.
    fn forward(&mut self, direction: usize, back: Instant) -> Result<(), Reset> {
        let destination = match direction {
            REPLIES => Some(&self.client),
            _ => self.server.as_ref(),
        };
        let Some(mut destination) = destination else {
            return Ok(());
        };
        let now = Instant::now();
        let flow = &mut self.flows[direction];
        while let Some((due, packet)) = flow.queue.front_mut()
            && *due <= now
        {
            let sent: io::Result<usize> = match packet {
                Packet::Bytes(bytes) => destination.write(bytes),
                Packet::End => destination.shutdown(Shutdown::Write).map(|()| 0),
                Packet::Reset => return Err(Reset),
            };
            match (sent, packet) {
                (Ok(length), Packet::Bytes(bytes)) if length < bytes.len() => {
                    bytes.drain(..length);
                    flow.length -= length;
                }
                (Ok(length), packet) => {
                    flow.closed = matches!(packet, Packet::End);
                    flow.length -= length;
                    flow.queue.pop_front();
                }
                (Err(error), _) if error.kind() == ErrorKind::WouldBlock => break,
                (Err(error), _) if error.kind() == ErrorKind::Interrupted => {}
                (Err(_), _) => {
                    flow.queue.clear();
                    (flow.length, flow.ended, flow.closed) = (0, true, true);
                    self.flows[1 - direction].end(Packet::Reset, back);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Ends it at both ends with RST: the sockets close with a linger time of zero.
    fn reset(self) {
        for end in [Some(self.client), self.server].into_iter().flatten() {
            // fails when the other side has reset it already
            let _ = set_socket_linger(&end, Some(Duration::ZERO));
        }
    }
}

impl Flow {
    fn has_room(&self) -> bool {
        !self.ended && self.length < ROOM
    }

    fn push(&mut self, bytes: Vec<u8>, due: Instant) {
        self.length += bytes.len();
        self.queue.push_back((due, Packet::Bytes(bytes)));
    }

    fn end(&mut self, how: Packet, due: Instant) {
        self.ended = true;
        self.queue.push_back((due, how));
    }
}

/// A socket as all of them are here.
fn prepare(socket: TcpStream) -> TcpStream {
    // neither fails on a socket that the other side has reset
    let _ = socket.set_nodelay(true);
    socket
        .set_nonblocking(true)
        .expect("a socket that does not block");
    socket
}
